//! The actions that an access can be for.

/// What a caller may be allowed to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Every caller may: health, metrics, the description of the API.
    Open,
    /// Read snapshots, tags and blobs.
    Pull,
    /// Store snapshots, and create or move tags.
    Push,
    /// Delete snapshots and tags.
    Delete,
    /// Operate the registry: collection, scrubs, background tasks.
    Admin,
}

impl Action {
    /// Its name in the OpenAPI document, in logs and, later, in tokens.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Pull => "pull",
            Self::Push => "push",
            Self::Delete => "delete",
            Self::Admin => "admin",
        }
    }
}

/// An action as a type, for the signature of a handler.
pub(crate) trait Permission: Send + 'static {
    /// The action.
    const ACTION: Action;
}

macro_rules! permissions {
    ($($name:ident),+) => {$(
        #[doc = concat!("See [`Action::", stringify!($name), "`].")]
        pub(crate) struct $name;
        impl Permission for $name {
            const ACTION: Action = Action::$name;
        }
    )+};
}

permissions!(Open, Pull, Push, Delete, Admin);
