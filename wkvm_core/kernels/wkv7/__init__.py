"""The WKV-7 recurrence: a matrix state per head with decay, one rank-one correction and one rank-one write a token.

    S <- S diag(w) + (S a) b^T + v k^T        S: [value, key]
    y  = S r

RWKV-7 gives a = -kk and b = kk * iclr with kk of unit length per head, and w in (0.5452, 1).

Every implementation takes `planes`, float32 `[7, tokens, heads, 64]`: r, k, v, w, a, b and one plane of scratch, and
`state`, a strided view `[slots, heads, 64, 64]` of one layer. Row i owns tokens `offsets[i]:offsets[i + 1]`, starts
from slot `read[i]`, leaves its state in slot `write[i]`; the result is y `[tokens, heads, 64]`. No slot is written by
one row and read by another."""
