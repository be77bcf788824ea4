"""Every option: its default, unit, bounds and help line, one file a concern. `server.settings` loads and checks them.

The structs of these files extend one another, since a msgspec struct has one base with fields:

    NetworkOptions ◀─ MediaOptions ◀─ EngineOptions ◀─ StreamOptions ◀─ settings.Settings
"""
