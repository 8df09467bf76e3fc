"Wrong answers to exercise fusion.6; mutants.py lists them."

import itertools

from course_lib.fusion import budget as fusion_budget


def _search(saved, inputs, flops, budget, held=fusion_budget.held, worth=None):
    worth = worth or (lambda s: sum(flops[i] for i in s))
    n = len(saved)
    subsets = [set(s) for k in range(n + 1) for s in itertools.combinations(range(n), k)]
    fitting = [s for s in subsets if held(saved, inputs, s) <= budget]
    if not fitting:
        least = min(held(saved, inputs, s) for s in subsets)
        raise ValueError(f"{budget} bytes can't be met, {least} at least are held")
    return sorted(min(fitting, key=worth))


def _greedy(saved, inputs, flops, budget, key):
    fusion_budget.choose(saved, inputs, flops, budget)  # refuses as it should
    again = set()
    for i in sorted(range(len(saved)), key=key):
        if fusion_budget.held(saved, inputs, again) <= budget:
            break
        again.add(i)
    return sorted(again)


def largest_first(saved, inputs, flops, budget):
    return _greedy(saved, inputs, flops, budget, lambda i: -saved[i])


def cheapest_first(saved, inputs, flops, budget):
    return _greedy(saved, inputs, flops, budget, lambda i: flops[i])


def best_ratio_first(saved, inputs, flops, budget):
    return _greedy(saved, inputs, flops, budget, lambda i: flops[i] / (saved[i] - inputs[i]))


def first_blocks_first(saved, inputs, flops, budget):
    return _greedy(saved, inputs, flops, budget, lambda i: i)


def recomputes_everything(saved, inputs, flops, budget):
    fusion_budget.choose(saved, inputs, flops, budget)
    return list(range(len(saved)))


def recomputes_nothing(saved, inputs, flops, budget):
    fusion_budget.choose(saved, inputs, flops, budget)
    return []


def fewest_blocks(saved, inputs, flops, budget):
    return _search(saved, inputs, flops, budget, worth=len)


def fewest_bytes(saved, inputs, flops, budget):
    return _search(saved, inputs, flops, budget, worth=lambda s: fusion_budget.held(saved, inputs, s))


def most_flops(saved, inputs, flops, budget):
    return _search(saved, inputs, flops, budget, worth=lambda s: -sum(flops[i] for i in s))


def forgets_that_values_come_back(saved, inputs, flops, budget):
    "Counts only what is kept at the end of the forward pass."

    def held(saved, inputs, again):
        return sum(inputs[i] if i in again else saved[i] for i in range(len(saved)))

    return _search(saved, inputs, flops, budget, held)


def all_values_come_back_at_once(saved, inputs, flops, budget):
    def held(saved, inputs, again):
        back = [saved[i] for i in again]
        return sum(inputs[i] if i in again else saved[i] for i in range(len(saved))) + max(back, default=0)

    return _search(saved, inputs, flops, budget, held)


def forgets_the_inputs(saved, inputs, flops, budget):
    return _search(saved, [0] * len(saved), flops, budget)


def keeps_the_input_twice(saved, inputs, flops, budget):
    return _search([a + b for a, b in zip(saved, inputs, strict=True)], inputs, flops, budget)


def walks_backward(saved, inputs, flops, budget):
    n = len(saved)
    found = _search(saved[::-1], inputs[::-1], flops[::-1], budget)
    return sorted(n - 1 - i for i in found)


def stays_under_the_budget(saved, inputs, flops, budget):
    "Takes no more for less."
    try:
        return _search(saved, inputs, flops, budget - 1)
    except ValueError:
        return _search(saved, inputs, flops, budget, worth=lambda s: -len(s))


def names_what_is_kept(saved, inputs, flops, budget):
    again = fusion_budget.choose(saved, inputs, flops, budget)
    return [i for i in range(len(saved)) if i not in again]


def counts_blocks_from_one(saved, inputs, flops, budget):
    return [i + 1 for i in fusion_budget.choose(saved, inputs, flops, budget)]


def does_its_best_over_budget(saved, inputs, flops, budget):
    try:
        return fusion_budget.choose(saved, inputs, flops, budget)
    except ValueError:
        return list(range(len(saved)))


def refuses_without_a_number(saved, inputs, flops, budget):
    try:
        return fusion_budget.choose(saved, inputs, flops, budget)
    except ValueError:
        raise ValueError("this does not fit") from None


def refuses_what_just_fits(saved, inputs, flops, budget):
    again = fusion_budget.choose(saved, inputs, flops, budget)
    if fusion_budget.held(saved, inputs, set(again)) == budget:
        raise ValueError(f"{budget} bytes can't be met")
    return again


def sorts_the_numbers_it_is_given(saved, inputs, flops, budget):
    again = fusion_budget.choose(saved, inputs, flops, budget)
    flops.sort()
    return again
