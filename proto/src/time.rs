//! Time as callers read it.

/// Milliseconds since 1970 as RFC 3339 in UTC, e.g. `2026-01-31T12:00:00.250Z`. What is past the calendar's end
/// (the year 9999) is shown as its last instant: a wrong clock must not stop an answer.
pub fn rfc3339(ms: u64) -> String {
    let ms = i64::try_from(ms).unwrap_or(i64::MAX);
    let at = jiff::Timestamp::from_millisecond(ms).unwrap_or(jiff::Timestamp::MAX);
    format!("{at:.3}")
}

#[cfg(test)]
mod tests {
    use super::rfc3339;

    #[test]
    fn as_callers_read_it() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(1_769_860_800_250), "2026-01-31T12:00:00.250Z");
        assert!(rfc3339(u64::MAX).starts_with("9999-12-"));
    }
}
