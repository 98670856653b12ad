"""What runs a model's layers and reads its vocabulary: operators, tensor-parallel ranks, or several devices.

`NativeLayers`, the backend of our own kernels, is in `layerskip_models.kernels.native_layers` beside the bindings it uses.
"""
