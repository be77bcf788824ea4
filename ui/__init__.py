"""Web UI: the Gradio application that the server mounts. Empty for now; the HTTP API is complete without it."""
