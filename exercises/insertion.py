"""The insertion of ME-LS in plain Python. Half an hour, after lesson 2.

A batch of policies comes to a repertoire, one after another. Each is (cell, fitness, spread). The
repertoire is a dictionary from a cell to (number of the policy in the batch, fitness, spread); a cell
that is not there is empty. Insert every policy by the rule of algorithm 1 and return the repertoire
after the last one. "Higher" and "lower" are strict: of equals, the first stays.

Also return how many were accepted, those included that were replaced later by another of the same batch.
The check compares you with `me_ls.py::insert`, on random batches with many ties.
"""

from collections.abc import Sequence

Inside = dict[int, tuple[int, float, float]]


def insert(offers: Sequence[tuple[int, float, float]]) -> tuple[Inside, int]:
    raise NotImplementedError("go through the offers with enumerate; look up the cell; compare")
