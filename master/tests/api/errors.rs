//! What this process logs at error level.

use parking_lot::Mutex;
use std::sync::OnceLock;
use tracing::{Event, Level, Subscriber, field::Visit};
use tracing_subscriber::{Layer, layer::Context, prelude::*};

static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Capture;

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0.push_str(&format!(" {field}={value:?}"));
    }
}

impl<S: Subscriber> Layer<S> for Capture {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() == Level::ERROR {
            let mut text = Text(event.metadata().target().to_owned());
            event.record(&mut text);
            SEEN.lock().push(text.0);
        }
    }
}

/// Begins to watch, once per process.
pub fn watch() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        let print = tracing_subscriber::fmt::layer()
            .with_test_writer()
            .with_filter(filter);
        tracing_subscriber::registry().with(Capture).with(print).init();
    });
}

/// Every error that a part of this crate's API logged, whatever test caused it.
pub fn of_the_api() -> Vec<String> {
    let ours = |t: &&String| {
        [
            "mooncake_master::http",
            "mooncake_master::session",
            "mooncake_master::reconciler",
        ]
        .iter()
        .any(|p| t.starts_with(p))
    };
    SEEN.lock().iter().filter(ours).cloned().collect()
}
