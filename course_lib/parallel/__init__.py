"""Several ranks: real processes with `torch.distributed`, from a notebook, under torchrun or on Slurm.

Ground shared by the lessons on data, tensor and pipeline parallelism and on scale:
`ranks` (N processes beside a notebook), `count` (messages and bytes), `timeline` (spans on one clock),
`launch` (the same functions under torchrun).
"""
