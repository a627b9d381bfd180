//! What callers may do.

use super::action::Action;

/// Which accesses are granted, to all callers alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Every access. Without tokens, this is the program's.
    #[default]
    All,
    /// Only what every caller may do: health, metrics, the description of the API.
    OpenOnly,
}

impl Policy {
    pub(super) fn grants(self, action: Action) -> bool {
        match self {
            Self::All => true,
            Self::OpenOnly => action == Action::Open,
        }
    }
}
