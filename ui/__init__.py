"""The web UI: a Gradio shell around custom elements that speak the server's public API as any client would."""
