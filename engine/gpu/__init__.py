"""What runs on an NVIDIA GPU only: Triton kernels, captured graphs and the runner that uses them. Imported with CUDA."""
