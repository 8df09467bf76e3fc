"""Every generator of random numbers that a training run draws from, set in one place and put back."""

import contextlib
import random

import torch


def seed_everything(seed):
    """Seed the global generators of Python, NumPy and torch (the CPU's and every GPU's).

    `seed` is an int from 0 to 2**32 - 1, NumPy's range; ValueError otherwise. Generators that a program
    made for itself (`random.Random`, `np.random.default_rng`, `torch.Generator`) are not reached.
    """
    import numpy as np

    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed!r}; expected a whole number from 0 to 4294967295, NumPy's range")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # the GPUs too, now or when CUDA starts


@contextlib.contextmanager
def seeded(seed):
    "Seed everything for the block, then put all generators back where they were."
    state = get_state()
    try:
        seed_everything(seed)
        yield
    finally:
        set_state(state)


def get_state():
    "The state of every global generator, as a dict; `set_state` puts it back."
    import numpy as np

    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else None,
    }


def set_state(state):
    "Put the global generators into a state that `get_state` returned."
    import numpy as np

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])


def sample_rng(seed, epoch, index):
    """A NumPy generator that belongs to one sample of one epoch, whichever worker draws it.

    The three numbers are mixed by NumPy's SeedSequence, so that (0, 1, 2) and (0, 2, 1) are unrelated.
    """
    import numpy as np

    return np.random.default_rng([seed, epoch, index])


def seed_worker(worker_id):
    """A `worker_init_fn`: Python, NumPy and the data set's own `rng` start afresh in each loader worker.

    torch gives each worker a seed of its own (the loader's base seed plus `worker_id`), and seeds the
    global generators with it. A generator kept in the data set is copied with it, the same copy in every
    worker; this replaces `dataset.rng` where there is one.
    """
    import numpy as np

    info = torch.utils.data.get_worker_info()
    seed = info.seed if info else torch.initial_seed()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if info is not None and hasattr(info.dataset, "rng"):
        info.dataset.rng = np.random.default_rng(seed)


class Jitter(torch.utils.data.Dataset):
    """A data set whose every item is one random number: `n` of them, each `(index, number)`.

    The number comes from `rng`, a generator that the data set keeps, or, with a `seed`, from the sample's
    own. It stands for augmentation. It is defined here since a loader's workers may have to import it.
    """

    def __init__(self, n, seed=None, epoch=0):
        import numpy as np

        self.n, self.seed, self.epoch = n, seed, epoch
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        rng = self.rng if self.seed is None else sample_rng(self.seed, self.epoch, index)
        return index, rng.random()


def drawn(dataset, workers, **options):
    "The numbers that a DataLoader with `workers` processes draws for the items, in the items' order."
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=workers, **options)
    found = {}
    for index, number in loader:
        found |= dict(zip(index.tolist(), number.tolist(), strict=True))
    return [found[i] for i in sorted(found)]


def loader_options(seed):
    """Arguments for a DataLoader whose order and workers depend on `seed` alone: `DataLoader(d, **options)`.

    Without a generator of its own a loader draws from torch's global one, so its order depends on
    everything that was drawn before.
    """
    return {"generator": torch.Generator().manual_seed(seed), "worker_init_fn": seed_worker}
