import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.head import AttendRequest, AttendResult

def attend(
    requests: list[AttendRequest],
    workspace: list[NDArray[np.uint8]],
    threads: int,
    lift_log_max: float,
) -> list[AttendResult]: ...
