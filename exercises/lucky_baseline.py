"""A lucky baseline. Twenty minutes, after lesson 2.

What if a policy plays ten episodes and is known by its *best* one? Write that as a `me_ls.Rule`: it
plays several episodes; its fitness is the highest of them, its descriptor that of the same episode, its
spread that of all; the fitter one stays.

Before you run the check, write down what you expect of the promised fitness and of the fitness in a
reassessment, beside MAP-Elites with its single episode.
"""

from me_ls import Rule


def lucky() -> Rule:
    raise NotImplementedError(
        'write a function like me_ls.characterise_once and return Rule("ME-Lucky", ..., fitter)'
    )
