"""A small, real reinforcement-learning run across processes, synchronised by PULSESync: what `pulse demo` shows.

One trainer process, or several that exchange updates by PULSELoCo, and some worker processes. Weights travel from
trainer to workers through a run, in any store; completions return through a socket. Needs the extra torch.
"""
