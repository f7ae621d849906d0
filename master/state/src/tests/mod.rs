//! Tests of the whole state machine.
