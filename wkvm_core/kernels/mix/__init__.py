"""Around the matrices: residual add, layer norm, and token shift with its mixes, in one pass over the residual stream."""
