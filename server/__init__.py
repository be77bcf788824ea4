"""Server: command line, settings, process supervision and the HTTP application. Never imports torch, except offline use."""
