"""Around the matrices: residual add, layer norm, token shift and its mixes, in one pass over the residual stream."""
