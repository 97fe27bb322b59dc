"""The insertion of ME-LS in plain Python."""

from collections.abc import Sequence

Inside = dict[int, tuple[int, float, float]]


def insert(offers: Sequence[tuple[int, float, float]]) -> tuple[Inside, int]:
    inside: Inside = {}
    accepted = 0
    for number, (cell, fitness, spread) in enumerate(offers):
        if cell in inside:
            _, old_fitness, old_spread = inside[cell]
            if not (fitness > old_fitness and spread < old_spread):
                continue
        inside[cell] = (number, fitness, spread)
        accepted += 1
    return inside, accepted
