"""Runs kernels on torch's tensors: a file for each kind, with what they share in ``base``.

Each kind has a function ``find``, which gives the launcher of an :class:`hopper_attention.problem.AttentionProblem`, or
of a config of the quantizer, whatever the sizes; and one that a call goes through: ``run_forward``, ``attend``,
``run_backward``, ``quantize_fused``.
"""
