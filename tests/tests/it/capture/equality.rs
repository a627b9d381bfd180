//! Equal state has equal digests, wherever and whenever it is captured.

use pfr_tests::{Host, Model, Registry};
use serde_json::Value;

/// Digests of the layers of a snapshot, without its configuration and logits.
fn layers(host: &Host, reference: &str) -> Vec<(String, String)> {
    let inspected = host.pf.json(&["inspect", reference]);
    let layers = inspected["manifest"]["layers"].as_array().unwrap_or_else(|| panic!("{inspected}"));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    layers.iter().map(|layer| (text(&layer["mediaType"]), text(&layer["digest"]))).collect()
}

#[test]
fn the_same_state_on_two_hosts_has_the_same_trees_and_checkpoint() {
    for (model, length) in [(Model::Hybrid, 45), (Model::Dense, 19)] {
        let registry = Registry::start();
        let (a, b) = (Host::new(&registry.url()), Host::new(&registry.url()));
        let mut one = a.engine("one", model, &["--placement", "11"]);
        let mut two = b.engine("two", model, &["--placement", "22", "--dirty", "5"]);
        // The second engine held another sequence before, and generates the same tokens in two
        // steps.
        let other = two.open(&model.prompt(17));
        two.generate(&other, 3);
        let (s, t) = (one.open(&model.prompt(length)), two.open(&model.prompt(length)));
        one.generate(&s, 10);
        two.generate(&t, 4);
        two.generate(&t, 6);
        let first = a.snapshot("one", "team/one:x", &["--sequence", &s]);
        let second = b.snapshot("two", "team/two:x", &["--sequence", &t]);
        assert_eq!(layers(&a, "team/one:x"), layers(&b, "team/two:x"), "{model:?}");
        assert!(first["push"]["sent_bytes"].as_u64().unwrap() > 50_000, "{first}");
        // Nothing but configuration and manifest: both are small documents.
        let sent = second["push"]["sent_bytes"].as_u64().unwrap();
        assert!(sent < 8192, "{model:?}: {sent} bytes were sent for a state that the registry had: {second}");
    }
}
