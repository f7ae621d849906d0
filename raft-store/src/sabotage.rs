//! Rules that a test breaks on purpose in a whole process, to see that its checkers notice.
//!
//! Without the feature `sabotage`, which no release build can have, all of this is nothing.

#[cfg(all(feature = "sabotage", not(debug_assertions)))]
compile_error!("the feature `sabotage` breaks the product on purpose: it exists in debug builds only");

/// Names the rules to break, with commas between them.
#[cfg(feature = "sabotage")]
const SWITCHES: &str = "MOONCAKE_SABOTAGE";

/// Whether a test wants this rule broken. Ask once, at the start.
pub fn is_broken(rule: &str) -> bool {
    #[cfg(feature = "sabotage")]
    if std::env::var(SWITCHES).is_ok_and(|rules| rules.split(',').any(|r| r == rule)) {
        tracing::warn!(rule, "this process breaks a rule on purpose");
        return true;
    }
    let _ = rule;
    false
}
