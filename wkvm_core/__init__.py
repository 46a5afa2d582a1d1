"""The engine core: owns the slots, the step loop and the store. Speaks token ids only."""
