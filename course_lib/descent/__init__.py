"Lesson descent: what its cells don't show. Its optimisers and loops are written in the notebook."

import itertools


def judged_order(guess, order):
    "A sentence: how many pairs of `guess` are in the same order as in `order`, the best first in both."
    if guess is None:
        return "no prediction was written down"
    if not isinstance(guess, list | tuple | str) or sorted(map(str, guess)) != sorted(order):
        return f"your prediction is {guess}; expected these four, each once: {', '.join(sorted(order))}"
    pairs = list(itertools.combinations(guess, 2))
    right = sum(order.index(a) < order.index(b) for a, b in pairs)
    return f"you predicted {', '.join(guess)}: {right} of {len(pairs)} pairs are in this order"
