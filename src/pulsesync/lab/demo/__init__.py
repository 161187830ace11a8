"""A small, real reinforcement-learning run across processes, synchronised by PULSESync: what `pulse demo` shows.

One trainer process, or several that meet by PULSELoCo, and some worker processes. Weights go from trainer to workers
through a run, in any store; completions go back through a socket. Needs the extra torch.
"""
