import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.head import HeadIndex

def attend_read(
    index: HeadIndex,
    read: NDArray[np.uint32],
    logits: NDArray[np.float32],
    centroid_logits: NDArray[np.float32],
    estimate: bool,
    lift: NDArray[np.float32] | None = None,
    lift_log_max: float = 0.0,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]: ...
def attend_exact(
    index: HeadIndex, queries: NDArray[np.float32], scaling: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
