//! Values of command lines: `2GiB`, `5s`.

use std::time::Duration;

/// `2GiB`, `512MiB`, `4096` (bytes).
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text);
    let unit = match unit {
        "GiB" => 1 << 30,
        "MiB" => 1 << 20,
        "KiB" => 1 << 10,
        "" | "B" => 1,
        other => return Err(format!("'{other}' is no unit: write 2GiB, 512MiB or 64KiB")),
    };
    match number.parse::<u64>().ok().and_then(|n| n.checked_mul(unit)) {
        Some(size) if size > 0 => Ok(size),
        _ => Err(format!("'{text}' is no size, such as 2GiB")),
    }
}

/// `5s`, `500ms`, `2m`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        _ => return Err(format!("'{text}' has no unit: write 5s, 500ms or 2m")),
    };
    match number.parse::<u64>().ok().and_then(|n| n.checked_mul(unit_ms)) {
        Some(ms) if ms > 0 => Ok(Duration::from_millis(ms)),
        _ => Err(format!("'{text}' is no time, such as 5s")),
    }
}

fn split(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times() {
        assert_eq!(parse_size("2GiB"), Ok(2 << 30));
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_duration("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        for bad in ["", "0", "2GB", "GiB", "-1", "1.5GiB", "99999999999GiB"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        for bad in ["", "5", "0s", "s", "1h", "1.5s"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }
}
