"""Torch building blocks that encoders and language models share. Preprocess workers never import this package."""
