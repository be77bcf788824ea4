"""Vision encoders in torch, one a file; the engine runs them. Preprocess workers never import this package."""
