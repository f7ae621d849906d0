//! Texts for people: what an answer or the log repeats of a caller's words, and the causes behind an error.

use std::{borrow::Cow, error::Error};

/// Longest piece of a caller's text that an answer, a warning or the log repeats, in characters.
pub const MAX_ECHO_CHARS: usize = 200;

/// What libraries say where they say nothing: a cause behind it does.
const EMPTY_WORDS: [&str; 2] = ["", "transport error"];

/// A caller's text for a message: what is over the limit is left out, and an ellipsis says so.
pub fn cut(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_ECHO_CHARS) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
    }
}

/// An error in one line, with the causes behind it that say something new.
pub fn chain(error: &dyn Error) -> String {
    let text = error.to_string();
    let chained = chain_after(&text, error.source());
    if chained.is_empty() { text } else { chained }
}

/// `text` with the causes from `cause` on that say something new. Empty if nobody says anything.
pub fn chain_after(text: &str, cause: Option<&(dyn Error + 'static)>) -> String {
    let mut out = String::new();
    let mut add = |part: &str| {
        if EMPTY_WORDS.contains(&part) || out.contains(part) {
            return;
        }
        if !out.is_empty() {
            out.push_str(": ");
        }
        out.push_str(part);
    };
    add(text);
    let mut next = cause;
    while let Some(error) = next {
        add(&error.to_string());
        next = error.source();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(cut("short"), "short");
        let just = "ü".repeat(MAX_ECHO_CHARS);
        assert_eq!(cut(&just), just);
        assert_eq!(cut(&format!("{just}x")), format!("{just}…"));
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Layer(&'static str, #[source] Option<Box<Layer>>);

    #[test]
    fn causes_that_say_something_new_are_named() {
        let chained = |texts: &[&'static str]| {
            let inner_first = texts.iter().rev();
            chain(
                &*inner_first
                    .fold(None, |inner, text| Some(Box::new(Layer(text, inner))))
                    .unwrap(),
            )
        };
        assert_eq!(chained(&["a: b", "b", "c"]), "a: b: c");
        assert_eq!(
            chained(&["transport error", "transport error", "refused"]),
            "refused"
        );
        assert_eq!(chained(&["transport error"]), "transport error");
        assert_eq!(chain_after("", None), "");
    }
}
