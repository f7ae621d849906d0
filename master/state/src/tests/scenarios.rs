//! One test per rule of the design that spans several commands.

mod creating;
mod ending;
mod nodes;
mod seeding;

use super::*;
use JobStatus as J;
use PlacementState as P;
