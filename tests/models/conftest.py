"""One thread: two cores are shared with whatever else runs."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
