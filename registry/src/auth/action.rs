//! Actions as types, for the signatures of handlers.

use pfr_schema::Action;

/// What a handler needs a permission for.
pub(crate) trait Permission: Send + 'static {
    /// The action; none if every caller may.
    const ACTION: Option<Action>;
}

macro_rules! permissions {
    ($($(#[$doc:meta])* $name:ident = $action:expr;)+) => {$(
        $(#[$doc])*
        pub(crate) struct $name;
        impl Permission for $name {
            const ACTION: Option<Action> = $action;
        }
    )+};
}

permissions! {
    /// Every caller may: health, the description of the API.
    Open = None;
    /// See [`Action::Pull`].
    Pull = Some(Action::Pull);
    /// See [`Action::Push`].
    Push = Some(Action::Push);
    /// See [`Action::Delete`].
    Delete = Some(Action::Delete);
    /// See [`Action::Admin`].
    Admin = Some(Action::Admin);
}

/// The name of an action in the OpenAPI document and in logs.
pub(crate) fn name_of(action: Option<Action>) -> &'static str {
    action.map_or("open", Action::name)
}
