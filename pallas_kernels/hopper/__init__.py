"""What several Mosaic GPU kernels share: engines that more than one op runs, layouts, loops of resident programs.

A kernel of resident, warp-specialized programs is written the same way everywhere:

    Arrays     NamedTuple of the references into device memory, in the order of the call: inputs, then outputs
    Buffers    NamedTuple of shared memory and barriers, in the order of `scratch_types`
    a frozen dataclass that holds both, with one method for each warpgroup and small ones for what they share
"""
