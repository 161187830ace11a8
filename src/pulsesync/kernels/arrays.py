"""Arrays of numpy, by the type of their elements."""

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
Bits = NDArray[np.unsignedinteger]  # the bits of weights, as unsigned integers
