"""The WKV-7 recurrence: a matrix state per head with decay, one rank-one correction and one rank-one write a token.

    S <- S diag(w) + (S a) b^T + v k^T        S: [value, key]
    y  = S r

RWKV-7 gives a = -kk and b = kk * iclr with kk of unit length per head, and w in (0.5452, 1).

Every implementation is bound to one launch and its `planes`, float32 `[7, tokens, heads, 64]`: r, k, v, w, a, b and one
plane of scratch, filled anew for each layer. Called with `state`, a strided view `[slots, heads, 64, 64]` of one layer,
it returns y `[tokens, heads, 64]`, valid until the next call. Row i owns tokens `offsets[i]:offsets[i + 1]`, starts
from slot `read[i]` and leaves its state in slot `write[i]`. No slot is written by one row and read by another."""
