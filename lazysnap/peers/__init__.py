"""Connections between the keepers of a job: reports, orders and reads of memory, over TCP behind a handshake."""
