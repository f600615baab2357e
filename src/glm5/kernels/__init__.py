"""Operations of the model, each with a plain PyTorch reference and, where it pays, a native form.

``dispatch`` is the only module that other layers import; ``reference`` is the specification of every operation and
what a device without a native form runs; ``cpu`` holds the compiled CPU form.
"""
