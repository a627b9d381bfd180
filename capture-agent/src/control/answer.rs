//! Errors as callers see them: `application/problem+json`.

use crate::Error;
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pfr_schema::ErrorCode;
use pfr_schema::api::Problem;

/// Media type of a problem.
const MEDIA_TYPE: &str = "application/problem+json";

/// Why a request was not done. As a response it is a status with the problem attached; [`super::observe`] writes the body.
#[derive(Clone, Debug)]
pub(super) struct Failure(Box<Problem>);

impl Failure {
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        Self(Box::new(Problem {
            r#type: format!("urn:pf:problem:{code}"),
            title: code.title().into(),
            status: code.status(),
            detail: detail.into(),
            code,
            retryable: code.retryable(),
            missing: Vec::new(),
            request_id: None,
        }))
    }

    /// The same with a more exact status.
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.0.status = status.as_u16();
        self
    }

    pub fn code(&self) -> ErrorCode {
        self.0.code
    }

    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// The response as sent.
    pub fn into_problem(self, request_id: &str) -> Response {
        let status = self.status();
        let problem = Problem { request_id: Some(request_id.to_owned()), ..*self.0 };
        let mut response = (status, Json(problem)).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        response
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self(Box::new(error.problem()))
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = self.status().into_response();
        response.extensions_mut().insert(self);
        response
    }
}
