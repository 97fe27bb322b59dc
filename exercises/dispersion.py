"""Dispersion instead of spread. Twenty minutes, after lesson 1.

Section 3 of the paper mentions a cheaper relative of the spread: the *dispersion*, the mean distance of
the descriptors to their mean. It needs K distances instead of K·(K − 1) / 2.

1. Write `dispersion` with jax.numpy.
2. Would a search with dispersion choose the same policies? Find two clouds of points for which the
   answer is no: `disagreement` returns clouds a and b such that a has the lower spread and b has the
   lower dispersion. (The clouds may have different numbers of points. Try points on a line first.)
"""

from jaxtyping import Array, Float


def dispersion(descriptors: Float[Array, "episodes d"]) -> Float[Array, ""]:
    raise NotImplementedError(
        "take the mean over episodes, then the mean length of the differences"
    )


def disagreement() -> tuple[Float[Array, "n d"], Float[Array, "m d"]]:
    raise NotImplementedError(
        "return two clouds; compare one far outlier with two camps of equal size"
    )
