"""Live sessions over WebSocket: `session` decides, `connection` carries, `hub` knows them all. See docs/protocol.md."""
