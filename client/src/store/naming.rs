//! Names of folders. Frozen: they are on disks and in callers' hands.
//!
//! A component is kept readable (`org/name` becomes `org--name`, as model hubs do) and is injective: two
//! different texts never share a name. What would collide is percent-encoded: `%` itself, control bytes,
//! a leading `.`, and a `-` beside another `-` or a `/` (so that in the result an even run of dashes is
//! always slashes and a single dash always a dash). The empty text is a lone `%`. A name over 255 bytes
//! is cut and ends in `%.` and its SHA-256: no short name holds `%.`. Not guaranteed: that names differ
//! on a filesystem that folds case or normalises Unicode.

use mooncake_proto::{digest::Digest, ids::ModelRef};
use std::{fmt::Write, path::PathBuf};

/// Longest file name (Linux's `NAME_MAX`).
const NAME_MAX_BYTES: usize = 255;
/// How much of a model's name a staging folder's name repeats, for people who look.
const KEY_HINT_BYTES: usize = 80;

/// One component.
pub(crate) fn component(text: &str) -> String {
    if text.is_empty() {
        return "%".into();
    }
    let bytes = text.as_bytes();
    let mut name = String::with_capacity(text.len() + 8);
    for (i, c) in text.char_indices() {
        let dashy = |at: Option<usize>| {
            at.and_then(|at| bytes.get(at))
                .is_some_and(|b| matches!(b, b'-' | b'/'))
        };
        match c {
            '/' => name.push_str("--"),
            '-' if dashy(i.checked_sub(1)) || dashy(Some(i + 1)) => name.push_str("%2D"),
            '.' if i == 0 => name.push_str("%2E"),
            '%' => name.push_str("%25"),
            c if c.is_control() => {
                for b in c.encode_utf8(&mut [0; 4]).bytes() {
                    let _ = write!(name, "%{b:02X}");
                }
            }
            c => name.push(c),
        }
    }
    if name.len() > NAME_MAX_BYTES {
        let tail = format!("%.{}", Digest::sha256(bytes));
        name.truncate(name.floor_char_boundary(NAME_MAX_BYTES - tail.len()));
        name.push_str(&tail);
    }
    name
}

/// `<provider>/<model_id>/<revision>/<format>`.
pub(crate) fn final_path(model: &ModelRef) -> PathBuf {
    [&model.provider, &model.model_id, &model.revision, &model.format]
        .map(|c| component(c))
        .iter()
        .collect()
}

/// One name for a whole [`ModelRef`]: a hint for people and a digest of the four components.
pub(crate) fn key(model: &ModelRef) -> String {
    let mut bytes = Vec::new();
    for (_, text) in model.components() {
        bytes.extend((text.len() as u64).to_be_bytes());
        bytes.extend(text.as_bytes());
    }
    let mut name = component(&model.model_id);
    name.truncate(name.floor_char_boundary(KEY_HINT_BYTES));
    format!("{name}@{}", &Digest::sha256(&bytes).to_string()[..40])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn frozen_names() {
        for (text, name) in [
            ("org/name", "org--name"),
            ("Llama-3.1-8B", "Llama-3.1-8B"),
            ("a--b", "a%2D%2Db"),
            ("a/-b", "a--%2Db"),
            ("a-/b", "a%2D--b"),
            (".mooncake", "%2Emooncake"),
            ("..", "%2E."),
            ("a//b", "a----b"),
            ("100%", "100%25"),
            ("", "%"),
            ("\n", "%0A"),
            ("é", "é"),
        ] {
            assert_eq!(component(text), name, "{text:?}");
        }
        let long = component(&"x/".repeat(128));
        assert_eq!(long.len(), 255);
        assert_eq!(
            long,
            format!(
                "{}%.{}",
                "x--".repeat(63),
                Digest::sha256("x/".repeat(128).as_bytes())
            )
        );
    }

    /// Undoes [`component`] for names that were not cut: proof that nothing collides.
    fn decode(name: &str) -> String {
        if name == "%" {
            return String::new();
        }
        let mut out = Vec::new();
        let bytes = name.as_bytes();
        let mut i = 0;
        while i < bytes.len() {
            match bytes[i] {
                b'%' => {
                    out.push(u8::from_str_radix(&name[i + 1..i + 3], 16).unwrap());
                    i += 3;
                }
                b'-' if bytes.get(i + 1) == Some(&b'-') => {
                    out.push(b'/');
                    i += 2;
                }
                b => {
                    out.push(b);
                    i += 1;
                }
            }
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn short_texts_never_collide() {
        // Every text up to length 5 over the alphabet that makes trouble.
        let mut seen: HashMap<String, String> = HashMap::new();
        let mut texts = vec![String::new()];
        for _ in 0..5 {
            texts = texts
                .iter()
                .flat_map(|t| ["-", "/", "%", ".", "a", "2"].map(|c| format!("{t}{c}")))
                .collect();
            for text in &texts {
                let name = component(text);
                assert!(name != "." && name != ".." && !name.contains('/') && !name.starts_with('.'));
                assert_eq!(decode(&name), *text);
                assert_eq!(seen.insert(name, text.clone()), None, "{text:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_file_name(text in "\\PC{0,256}|[-/%.\\x00-\\x1f]{0,256}") {
            let name = component(&text);
            prop_assert!(!name.is_empty() && name.len() <= 255 && !name.contains('/') && !name.contains('\0'));
            if !name.contains("%.") {
                prop_assert_eq!(decode(&name), text);
            }
        }
    }
}
