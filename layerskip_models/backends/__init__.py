"""What runs a model's layers: PyTorch's operators, on one device or on several.

`NativeLayers`, the backend of our own kernels, is in `layerskip_models.kernels.native_layers` beside the bindings it uses.
"""
