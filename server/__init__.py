"""Server: command line, settings, process supervision, HTTP application. Never imports torch, except offline use."""
