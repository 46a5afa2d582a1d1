"""Matrix products with few rows of activations: the weights stream by once, several matrices in one launch."""
