"""Links between keepers of different nodes: orders, reports and reads of memory, over TCP behind a handshake."""
