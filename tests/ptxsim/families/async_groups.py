"""Groups of asynchronous operations that a thread commits and waits for, oldest first."""

from __future__ import annotations

import numpy as np


class Groups:
    """Each thread's commits: `steps[k, lane]` is the machine's step at the lane's k-th commit_group."""

    def __init__(self, n: int):
        self.count = np.zeros(n, np.int64)
        self.steps = np.zeros((16, n), np.int64)

    def commit(self, m):
        lanes = m.lanes
        if int(self.count[lanes].max()) >= len(self.steps):
            self.steps = np.concatenate([self.steps, np.zeros_like(self.steps)])
        self.steps[self.count[lanes], lanes] = m.step
        self.count[lanes] += 1

    def done(self, m, pending: int) -> np.ndarray:
        """Per active lane: the step of the newest commit that all but `pending` of the newest groups include."""
        lanes = m.lanes
        at = self.count[lanes] - pending - 1
        return np.where(at >= 0, self.steps[np.maximum(at, 0), lanes], 0)


def groups(m, kind: str) -> Groups:
    """The machine's groups of this kind: "cp.async" or "bulk"."""
    if kind not in m.state:
        m.state[kind] = Groups(m.n)
    return m.state[kind]
