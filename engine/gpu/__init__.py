"""What runs on an NVIDIA GPU only: Triton kernels, captured graphs, the runner that uses them."""
