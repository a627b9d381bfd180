//! The dashboard and the alerts ask for metrics that the programs have.

use super::files::{text, yaml};
use serde_json::Value;
use std::collections::BTreeSet;

/// Names in `describe_counter!(NAME, …)` and the like, by the macro. All metrics are described:
/// registry/tests/it/metrics.rs.
fn described() -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    for file in ["registry/src/metrics.rs", "capture-agent/src/metrics.rs"] {
        let source = text(file);
        let literal = |name: &str| {
            let declared = source.split(&format!(" {name}: &str = \"")).nth(1)?;
            Some(declared.split('"').next()?.to_owned())
        };
        for (at, _) in source.match_indices("describe_") {
            let Some((kind, rest)) = source[at..].split_once("!(") else { continue };
            if !["describe_counter", "describe_gauge", "describe_histogram"].contains(&kind) {
                continue;
            }
            let argument = rest.split(',').next().unwrap_or_default().trim();
            let name = argument.strip_prefix('"').map_or_else(|| literal(argument), |quoted| Some(quoted.trim_end_matches('"').to_owned()));
            found.extend(name.map(|name| (name, kind.to_owned())));
        }
    }
    assert!(found.len() > 50, "{found:?}");
    found
}

/// Names that Prometheus has after a scrape.
fn scraped() -> BTreeSet<String> {
    described()
        .into_iter()
        .flat_map(|(name, kind)| match kind.as_str() {
            "describe_histogram" => ["_bucket", "_sum", "_count"].map(|end| format!("{name}{end}")).to_vec(),
            _ => vec![name],
        })
        .collect()
}

/// Names of our metrics in an expression.
fn names(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    // `job="pf-registry"` is no metric.
    words.filter(|word| word.starts_with("pf_")).map(str::to_owned).collect()
}

#[test]
fn every_query_of_the_dashboard_names_metrics_that_exist() {
    let dashboard: Value = serde_json::from_str(&text("deploy/grafana/pf.json")).unwrap();
    let (exported, mut used, mut ids) = (scraped(), BTreeSet::new(), BTreeSet::new());
    let mut check = |title: &str, expression: &str| {
        let found = names(expression);
        let unknown: Vec<&String> = found.difference(&exported).collect();
        assert!(unknown.is_empty(), "{title}: {unknown:?} in {expression}");
        used.extend(found);
    };
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id is taken");
        if panel["type"] == "row" {
            continue;
        }
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title} shows nothing");
        for target in targets {
            check(title, target["expr"].as_str().unwrap());
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        check("a variable", variable["definition"].as_str().unwrap_or_default());
    }
    // A new metric belongs on the dashboard.
    let of = |name: &str| name.trim_end_matches("_bucket").to_owned();
    let used: BTreeSet<String> = used.iter().map(|name| of(name)).collect();
    let unseen: Vec<String> = described().into_iter().map(|(name, _)| name).filter(|name| !used.contains(name)).collect();
    assert!(unseen.is_empty(), "the dashboard does not show {unseen:?}");
}

#[test]
fn every_alert_names_metrics_and_errors_that_exist_and_says_what_to_do() {
    let (exported, errors) = (scraped(), text("schema/src/error.rs"));
    let rules = yaml("alerts.yaml", &text("deploy/prometheus/alerts.yaml"));
    let groups = rules[0]["groups"].as_array().unwrap();
    let mut alerts = BTreeSet::new();
    for rule in groups.iter().flat_map(|group| group["rules"].as_array().unwrap()) {
        let (name, expression) = (rule["alert"].as_str().unwrap(), rule["expr"].as_str().unwrap());
        assert!(alerts.insert(name.to_owned()), "{name} is there twice");
        let unknown: Vec<String> = names(expression).difference(&exported).cloned().collect();
        assert!(unknown.is_empty(), "{name}: {unknown:?}");
        for code in expression.split("code=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
            assert!(errors.contains(&format!("= \"{code}\", ")), "{name}: there is no error {code}");
        }
        assert!(["critical", "warning"].iter().any(|severity| rule["labels"]["severity"] == *severity), "{name}");
        for said in ["summary", "description"] {
            assert!(rule["annotations"][said].as_str().is_some_and(|text| text.len() > 20), "{name} has no {said}");
        }
    }
    assert!(alerts.len() >= 15, "{alerts:?}");
}

#[test]
fn routes_in_queries_are_routes_of_the_registry() {
    let routes: Value = serde_json::from_str(&text("registry/openapi.json")).unwrap();
    let routes = routes["paths"].as_object().unwrap();
    for name in ["deploy/prometheus/alerts.yaml", "deploy/grafana/pf.json"] {
        let text = text(name).replace("\\\"", "\"");
        for route in text.split("route=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
            assert!(routes.contains_key(route), "{name}: {route}");
        }
    }
}
