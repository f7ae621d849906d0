//! Validation through its front door: the RFC's example, then one fault at a time, then all at once.
