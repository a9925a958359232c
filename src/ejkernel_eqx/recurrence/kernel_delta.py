"""`KernelDeltaAttention`: the delta rule with a decay for every key channel."""

from typing import ClassVar

from .delta import GatedDelta
from .spec import KEY


class KernelDeltaAttention(GatedDelta):
    r"""Kimi delta attention (KDA): a delta rule with a decay for every key channel.

    $$\bar S_t = \mathrm{diag}(e^{g_t})\, S_{t-1}, \qquad S_t = \bar S_t + \beta_t k_t (v_t - \bar S_t^\top k_t)^\top, \qquad
      o_t = \mathrm{scale}\; S_t^\top q_t$$

    The options are applied first, in float32, to the gates $r$ and write strengths $b$ that are passed in:

    - `gate="log"`: $g = r \le 0$; `"softplus"`: $g = -e^{A} \log(1 + e^{r + \mathrm{bias}})$; `"bounded"`:
      $g = \mathrm{lower\_bound} \cdot \sigma(e^{A} (r + \mathrm{bias}))$, with $A$ = `A_log` and bias = `dt_bias`;
    - `use_qk_l2norm`: $q$ and $k$ are divided by $\sqrt{\sum x^2 + 10^{-6}}$;
    - `beta_sigmoid`: $\beta = \sigma(b)$. `allow_neg_eigval` doubles $\beta$, so that the eigenvalues of $I - \beta k
        k^\top$ lie in $[-1, 1]$ for keys of norm 1.

    Let $R$ be the largest head count. Output head $r$ reads head $\lfloor r / (R / n) \rfloor$ of an operand with $n$
    heads. The state has the largest head count of `k`, `v`, `g`, `beta`.

    Platforms and derivatives: as for [`ejkernel_eqx.GatedLinearAttention`][].

    Sources: Kimi Team, *Kimi Linear: An Expressive, Efficient Attention Architecture* (2025); Yang et al., *Gated Delta Networks* (2024);
    Grazzi et al., *Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues* (2024).
    """

    operation: ClassVar[str] = "kernel_delta_attention"
    __init__ = GatedDelta.__init__
    decay: ClassVar[str] = KEY
