"""What keepers of different nodes tell each other and read from each other, over mutual TLS 1.3."""
