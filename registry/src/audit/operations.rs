//! What the audit log makes of each operation, from the routes' own description.

use crate::auth::name_of;
use pfr_schema::Action;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;

/// Operations that change something in one transaction, which writes their record too.
const CHANGES: [&str; 17] = [
    "commit",
    "put_tag",
    "delete_tag",
    "delete_snapshot",
    "fork",
    "create_domain",
    "delete_domain",
    "set_quota",
    "set_retention",
    "sign",
    "set_signing",
    "create_token",
    "revoke_token",
    "forget_agent",
    "PUT /v2/{repo}/manifests/{reference}",
    "DELETE /v2/{repo}/manifests/{reference}",
    "DELETE /v2/{repo}/blobs/{digest}",
];
/// Operations of a push before its commit, or before the manifest of an image. Nothing of it has a
/// name: it becomes garbage if neither follows.
const PREPARATIONS: [&str; 8] = [
    "open_push",
    "missing",
    "put_frames",
    "abort_push",
    "POST /v2/{repo}/blobs/uploads",
    "PATCH /v2/{repo}/blobs/uploads/{id}",
    "PUT /v2/{repo}/blobs/uploads/{id}",
    "DELETE /v2/{repo}/blobs/uploads/{id}",
];

/// Asked for every few seconds, and about nothing that is stored: metrics, and reports of agents.
const FREQUENT: [&str; 2] = ["metrics", "report_agent"];

/// When an operation is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Never: health, and the description of the API, which refuse no caller.
    Never,
    /// Only if it is refused: metrics, and reports of agents.
    IfRefused,
    /// Before it begins, if reads are to be recorded.
    IfReads,
    /// In the transaction of the change.
    InTransaction,
    /// Before it begins: it is no single transaction.
    Before,
}

/// An operation.
#[derive(Clone, Debug)]
pub(super) struct Operation {
    pub(super) id: String,
    pub(super) action: &'static str,
    pub(super) when: When,
}

impl Operation {
    fn new(id: String, method: &str, action: &str) -> Self {
        let action = Action::ALL.into_iter().find(|known| known.name() == action);
        let when = when(&id, method, action);
        Self { id, action: name_of(action), when }
    }
}

/// All operations, by method and route. A page, and a route of the OCI API, have both as their id.
pub(super) struct Operations(HashMap<(String, String), Arc<Operation>>);

impl Operations {
    /// Reads the OpenAPI document of the routes, and the routes that it does not have with their
    /// actions.
    pub(super) fn of(document: &str, others: impl Iterator<Item = (String, &'static str)>) -> Self {
        let document: Value = serde_json::from_str(document).unwrap_or_default();
        let mut operations = HashMap::new();
        for (path, item) in document["paths"].as_object().into_iter().flatten() {
            for (method, operation) in item.as_object().into_iter().flatten() {
                let id = operation["operationId"].as_str().unwrap_or_default().to_owned();
                let action = operation["x-pf-action"].as_str().unwrap_or_default();
                operations.insert((method.to_uppercase(), path.clone()), Arc::new(Operation::new(id, &method.to_uppercase(), action)));
            }
        }
        for (id, action) in others {
            let (method, path) = id.split_once(' ').unwrap_or_default();
            let key = (method.to_owned(), path.to_owned());
            let operation = Operation::new(id.clone(), &key.0, action);
            operations.insert(key, Arc::new(operation));
        }
        Self(operations)
    }

    pub(super) fn find(&self, method: &str, route: &str) -> Option<Arc<Operation>> {
        // The router answers HEAD with the handler of GET.
        let method = if method == "HEAD" { "GET" } else { method };
        self.0.get(&(method.to_owned(), route.to_owned())).cloned()
    }
}

fn when(id: &str, method: &str, action: Option<Action>) -> When {
    match action {
        None => When::Never,
        Some(_) if FREQUENT.contains(&id) => When::IfRefused,
        Some(_) if CHANGES.contains(&id) => When::InTransaction,
        Some(Action::Pull) => When::IfReads,
        Some(_) if method == "GET" || PREPARATIONS.contains(&id) => When::IfReads,
        Some(_) => When::Before,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes;
    use std::collections::BTreeSet;

    /// A new operation that changes something must have its record in its transaction, or before
    /// it. This list makes that a decision.
    #[test]
    fn every_operation_that_is_no_read_is_recorded() {
        let operations = Operations::of(&routes::openapi(), routes::actions_of_others());
        let ids = |wanted: When| -> BTreeSet<&str> {
            operations.0.values().filter(|operation| operation.when == wanted).map(|operation| operation.id.as_str()).collect()
        };
        assert_eq!(ids(When::InTransaction), CHANGES.into());
        assert_eq!(ids(When::Before), ["start_gc", "pause_task", "resume_task", "scrub", "run_retention"].into());
        assert!(PREPARATIONS.iter().all(|id| ids(When::IfReads).contains(id)));
        assert_eq!(ids(When::Never), ["livez", "readyz", "openapi", "GET /docs", "GET /ui/-/style.css", "GET /ui/-/icon.svg"].into());
        assert_eq!(ids(When::IfRefused), FREQUENT.into());
        for ((method, route), operation) in &operations.0 {
            let is_read = method == "GET" || operation.action == "pull" || PREPARATIONS.contains(&operation.id.as_str());
            let is_recorded = matches!(operation.when, When::InTransaction | When::Before | When::IfRefused);
            assert!(is_read || is_recorded, "{method} {route}");
        }
    }
}
